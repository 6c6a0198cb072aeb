"""torch.distributed.init_process_group("lockstep"): collectives between CPU ranks of one host, in shared memory.

`import torch` loads this module through the entry point "torch.backends". If that is switched off
(TORCH_DEVICE_BACKEND_AUTOLOAD=0), use `import torch_lockstep`.
"""

import atexit
import functools
import pkgutil
import sys

# The source tree has this file too, but not the built module, which may be further along the path.
__path__ = pkgutil.extend_path(__path__, __name__)

try:
    from ._built import version as __version__
except ImportError:  # reported when a group requests the backend: `import torch` must not fail because of it
    __version__ = None


def _module():
    import torch

    try:
        from . import _built
    except ImportError:
        raise ImportError(
            f"torch_lockstep is not built: {', '.join(__path__)} has only the sources. Run `./dev build` and add "
            "build/python to PYTHONPATH, or run `pip install --no-build-isolation ./python`"
        ) from None
    have = torch.__version__.split("+")[0]
    if have != _built.torch:
        raise RuntimeError(
            f"torch_lockstep was built for torch {_built.torch}, but this is torch {have}: rebuild it with this version"
        )
    from . import _C

    return _C


def _backends(frame):
    """Returns {device: backend} of the group being created, or {}. PyTorch does not pass it to this function."""
    config = frame.f_locals.get("backend_config")
    try:
        return dict(config.get_device_backend_map())
    except AttributeError:
        return {}


def _create(options, _backend_options=None):
    import torch.distributed as dist

    backends = _backends(sys._getframe(1))
    others = [device for device, name in backends.items() if name == "lockstep" and device != "cpu"]
    if others:
        raise ValueError(
            f"lockstep: expected the device cpu, got '{others[0]}:lockstep': this backend moves CPU tensors. Use "
            f"another backend for {others[0]}, for example init_process_group('cpu:lockstep,{others[0]}:nccl')"
        )
    module = _module()
    # However the program ends, no thread of this module may call into an interpreter that has shut down.
    atexit.unregister(module.leave_all)
    atexit.register(module.leave_all)
    # Our own group class reports its name, where PyTorch's reports "custom". But it replaces the whole group, and the
    # wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around a backend.
    if set(backends.values()) == {"lockstep"} and dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return module.create_group(options)
    return module.create_backend(options)


def _set_timeouts_too():
    """Extends PyTorch's _set_pg_timeout, which handles only the backend types that it knows."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    original = c10d._set_pg_timeout

    @functools.wraps(original)
    def set_pg_timeout(timeout, group=None):
        chosen = c10d._get_default_group() if group is None else group
        devices = chosen._device_types if isinstance(chosen, dist.ProcessGroup) else []
        backends = [chosen._get_backend(device) for device in devices]
        backends = [getattr(backend, "wrapped_pg", backend) for backend in backends]  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        ours = [backend for backend in backends if backend.name() == "lockstep"]
        for backend in ours:
            backend._set_default_timeout(timeout)
        if not ours or len(ours) < len(backends):
            original(timeout, group)

    c10d._set_pg_timeout = set_pg_timeout


def register():
    """Registers the backend with PyTorch. The module is loaded only when a group requests it."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "LOCKSTEP"):
        dist.Backend.register_backend("lockstep", _create, extended_api=True, devices=["cpu"])
        _set_timeouts_too()


# Last: if this module is imported before torch, `import torch` calls register() while this import is in progress. For
# the same reason the functions above import torch themselves.
import torch  # noqa: E402, F401

register()
