# Installs what a verb needs: Debian packages, LibTorch, the digits, clang and clang-format.

# Packages needed by each verb. .pack/ holds the files of the libraries; the other packages are tools.
readonly LIBRARIES=(libcli11-dev nlohmann-json3-dev libxxhash-dev libhwloc-dev libsodium-dev zlib1g-dev)
readonly TEST_LIBRARIES=(libgtest-dev libgmock-dev)
readonly BENCH_LIBRARIES=(libbenchmark-dev)
readonly MPI_LIBRARIES=(libopenmpi-dev libmpich-dev)
readonly RUNTIMES=(openmpi-bin mpich iproute2 slurm-wlm munge)
TORCH=

as_root() {
  if ((EUID == 0)); then "$@"; else sudo "$@"; fi
}

# True if this user is root or can become root.
may_install() { ((EUID == 0)) || { command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; }; }

# Asks now, because the output of what runs as root goes to a log.
ask_for_password() { ((EUID == 0)) || sudo -n true 2>/dev/null || sudo -v; }

apt_install() {
  # Waits for a while if something else is installing, such as the upgrades that Ubuntu makes after it starts.
  local wait=(-o DPkg::Lock::Timeout=300)
  # An interrupted run may have left packages that are unpacked but not configured.
  [[ ! $(dpkg --audit) ]] || as_root env DEBIAN_FRONTEND=noninteractive dpkg --configure -a || return
  as_root apt-get "${wait[@]}" update &&
    as_root env DEBIAN_FRONTEND=noninteractive apt-get "${wait[@]}" install -y --no-install-recommends "$@"
}

# A fresh container image has no package lists, which decide the packages to request. A failure here is ignored: it
# shows when apt-get installs, if anything is missing at all.
fetch_package_lists() {
  ! compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null && command -v apt-get >/dev/null && may_install || return 0
  ask_for_password
  step "Fetching the package lists" as_root apt-get update || true
}

# True if apt-get can install the package. A transitional package that installs a snap does not count.
apt_has() {
  local candidate
  candidate=$(apt-cache policy "$1" 2>/dev/null | awk '$1 == "Candidate:" { print $2 }')
  [[ $candidate && $candidate != "(none)" && $candidate != *snap* ]]
}

require_packages() {
  local installed package missing=()
  command -v dpkg-query >/dev/null ||
    die "this is not a Debian-like system, so nothing can be installed for you. Needed, under their Debian names:
  $*
Install the equivalents and use --offline with a .pack/ made by './dev pack' on a Debian machine."
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "$@" 2>/dev/null || true)
  for package; do
    [[ $'\n'$installed$'\n' == *$'\n'"installed $package"$'\n'* ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  if ! may_install; then
    die "packages are missing and this user cannot install them. Run, as root:
  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  fi
  ask_for_password
  step "Installing ${missing[*]}" apt_install "${missing[@]}" || explain "apt-get could not install these packages"
  # CMake remembers what it did not find.
  rm -f build/.configured build/check/*/.configured
}

# The first g++ that supports Lockstep's C++20. On Ubuntu 22.04 g++ is version 11, and g++-12 is a package of its own.
find_compiler() {
  local name
  for name in g++ g++-1{9,8,7,6,5,4,3,2}; do
    if (($("$name" -dumpversion 2>/dev/null | cut -d. -f1 || true) + 0 >= GCC_MIN)); then
      echo "$name"
      return
    fi
  done
}

# setup_packages PACKAGE...: installs the tools and libraries that every verb needs, and PACKAGE...
setup_packages() {
  local tool missing_tools=()
  # A tool may come from anywhere, so its package is requested only if the command is missing.
  for tool in cmake:cmake ninja:ninja-build python3:python3; do
    command -v "${tool%%:*}" >/dev/null || missing_tools+=("${tool#*:}")
  done
  COMPILER=${CXX:-$(find_compiler)}
  if ((OFFLINE)); then
    [[ -d .pack ]] ||
      die "--offline needs the folder .pack/: run './dev pack' where apt-get works and copy .pack/ here."
    [[ $COMPILER ]] || missing_tools+=("g++ $GCC_MIN or newer")
    ((${#missing_tools[@]} == 0)) || die "--offline installs nothing, and these are missing: ${missing_tools[*]}"
    return
  fi
  if [[ ! $COMPILER ]]; then
    fetch_package_lists
    missing_tools+=("$(compiler_package)")
  fi
  # pip installs LibTorch and the digits.
  if [[ ! ${LOCKSTEP_TORCH:-} || ! -e build/digits/labels.npy ]]; then
    mapfile -t -O "${#missing_tools[@]}" missing_tools < <(pip_packages)
  fi
  require_packages "${missing_tools[@]}" "${LIBRARIES[@]}" "$@"
  COMPILER=${CXX:-$(find_compiler)}
}

# Lists missing packages that pip in .venv/ needs. Debian's python3 cannot create a virtual environment; other Pythons can.
pip_packages() {
  venv_works || python3 -c 'import ensurepip' 2>/dev/null || echo python3-venv
  [[ -e /etc/ssl/certs/ca-certificates.crt ]] || echo ca-certificates
}

compiler_package() {
  local major
  # A regular expression, because apt-cache treats a plain g++ as one if it knows no such package.
  major=$(apt-cache policy '^g\+\+$' 2>/dev/null | sed -nE 's/^ *Candidate: ([0-9]+:)?([0-9]+).*/\2/p')
  if ((${major:-0} >= GCC_MIN)); then echo g++; else echo "g++-$GCC_MIN"; fi
}

# The test of the profile's page takes any of these browsers, and is skipped without one.
has_browser() {
  local name
  for name in chromium chromium-browser google-chrome; do
    ! command -v "$name" >/dev/null || return 0
  done
  return 1
}

browser_package() {
  if apt_has chromium; then
    echo chromium
  else
    echo "dev: apt-get has no browser 'chromium'; the test of the profile's page will be skipped" >&2
  fi
}

check_torch() {
  local origin=$1 version major minor
  [[ -d $TORCH/include/torch && -e $TORCH/lib/libtorch.so ]] ||
    die "$origin is not a LibTorch: expected include/torch/ and lib/libtorch.so in it.
Give the folder of an unpacked LibTorch, or what this prints:
  python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))'"
  # The macros moved between headers over the releases.
  version=$(cat "$TORCH"/include/torch/{headeronly/,csrc/api/include/torch/,}version.h 2>/dev/null |
    sed -nE 's/^#define TORCH_VERSION_(MAJOR|MINOR) +([0-9]+).*/\2/p' | paste -sd.) || true
  IFS=. read -r major minor _ <<<"$version"
  [[ $major && $minor ]] || die "cannot find the version of $origin (TORCH_VERSION_MAJOR in include/torch)."
  ((major > ${TORCH_MIN%.*} || (major == ${TORCH_MIN%.*} && minor >= ${TORCH_MIN#*.}))) ||
    die "$origin is LibTorch $major.$minor; Lockstep needs $TORCH_MIN or newer."
}

# Creating .venv may have been interrupted before pip was in it.
venv_works() { .venv/bin/python3 -m pip --version >/dev/null 2>&1; }

# venv_has PACKAGE[==VERSION]...: pip writes RECORD last, so an interrupted install does not pass for a whole one.
venv_has() {
  local package name version
  for package; do
    IFS='=' read -r name _ version <<<"$package"
    compgen -G ".venv/lib/python3*/site-packages/${name//-/_}-$version*.dist-info/RECORD" >/dev/null || return 1
  done
}

make_venv() { venv_works || step "Creating .venv" python3 -m venv --clear .venv || explain "'python3 -m venv .venv' failed"; }

# venv_install HEADING PIP-ARGUMENT... -- PACKAGE...
venv_install() {
  local heading=$1 arguments=() info
  shift
  while [[ $1 != -- ]]; do
    arguments+=("$1")
    shift
  done
  shift
  ! venv_has "$@" || return 0
  make_venv
  # pip considers a package with this folder installed, whether it has a RECORD or not.
  for info in .venv/lib/python3*/site-packages/*.dist-info; do
    [[ ! -d $info || -e $info/RECORD ]] || rm -rf "$info"
  done
  TMPDIR=$SCRATCH PROGRESS=downloads step "$heading" \
    .venv/bin/python3 -m pip install --disable-pip-version-check "${arguments[@]}" "$@" ||
    explain "pip could not install $* into .venv"
  venv_has "$@" || die ".venv does not hold all of: $*. Remove .venv and run the same command again."
}

# reachable URL: asked once and briefly, because pip itself would try for minutes.
reachable() {
  python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10)' "$1/" 2>/dev/null
}

# True if the torch in .venv/ has CUDA or, where there is none yet, setup_torch will install one that has. Without a GPU
# that depends on pip's indexes, and the answer is no.
torch_has_cuda() {
  [[ ! ${LOCKSTEP_TORCH:-} ]] || return 1
  if venv_has "torch==$TORCH_PIN"; then
    compgen -G '.venv/lib/python3*/site-packages/torch/lib/libtorch_cuda.so' >/dev/null
  else
    ((!OFFLINE)) && [[ -e /dev/nvidiactl ]]
  fi
}

# setup_torch PYTHON-PACKAGE...: installs LibTorch, and these packages in .venv/.
setup_torch() {
  local index=() size="about 200 MB"
  if [[ -n ${LOCKSTEP_TORCH:-} ]]; then
    TORCH=$LOCKSTEP_TORCH
    check_torch "LOCKSTEP_TORCH=$LOCKSTEP_TORCH"
    return
  fi
  if ((OFFLINE)); then
    [[ -d .venv ]] || die "--offline needs a LibTorch: set LOCKSTEP_TORCH=DIR, or copy a .venv/ with torch here."
  else
    # PyPI's torch includes several gigabytes of CUDA, which are needed only with a GPU.
    if [[ -e /dev/nvidiactl ]]; then
      size="about 3 GB with CUDA"
    elif venv_has "torch==$TORCH_PIN" || reachable "$TORCH_CPU_INDEX"; then
      index=(--extra-index-url "$TORCH_CPU_INDEX")
    else
      size="3 GB with CUDA, unless pip is set up with an index of CPU builds: $TORCH_CPU_INDEX does not answer"
    fi
    venv_install "Installing torch $TORCH_PIN into .venv (download: $size)" "${index[@]}" -- "torch==$TORCH_PIN" numpy
    (($# == 0)) || venv_install "Installing $* into .venv (download: about 15 MB)" -- "$@"
  fi
  TORCH=$(printf '%s\n' "$PWD"/.venv/lib/python3*/site-packages/torch | tail -n 1)
  check_torch "the torch in .venv"
}

# The handwritten digits in scikit-learn's wheel, for the example 04_digits. The folder is created completely or not at
# all.
setup_digits() {
  local folder=build/digits python=.venv/bin/python3
  [[ ! -e $folder/labels.npy ]] || return 0
  rm -rf "$folder" "$folder.new"
  mkdir -p build
  if ((OFFLINE)); then
    [[ -d .pack/digits ]] || return 0
    cp -r .pack/digits "$folder.new"
  else
    if ! venv_works && python3 -m pip --version >/dev/null 2>&1; then python=python3; else make_venv; fi
    TMPDIR=$SCRATCH PROGRESS=downloads step "Fetching the digits of scikit-learn (download: about 10 MB)" \
      "$python" -m pip download --disable-pip-version-check --no-deps --only-binary :all: -d "$SCRATCH/digits" scikit-learn ||
      explain "pip could not download scikit-learn, whose digits an example learns"
    python3 examples/04_digits/export.py "$SCRATCH"/digits/*.whl "$folder.new" ||
      die "cannot read the digits from scikit-learn's wheel."
  fi
  mv "$folder.new" "$folder"
}

# Sets CLANG_FORMAT; false if there is none and none may be installed.
setup_clang_format() {
  local binary=clang_format/data/bin/clang-format packages=()
  for CLANG_FORMAT in clang-format-18 clang-format; do
    [[ $("$CLANG_FORMAT" --version 2>/dev/null) != *" $CLANG_FORMAT_PIN"* ]] || return 0
  done
  if ((!OFFLINE)) && ! venv_has "clang-format==$CLANG_FORMAT_PIN"; then
    mapfile -t packages < <(pip_packages)
    ((${#packages[@]} == 0)) || require_packages "${packages[@]}"
    venv_install "Installing clang-format $CLANG_FORMAT_PIN into .venv (download: 2 MB)" -- "clang-format==$CLANG_FORMAT_PIN"
  fi
  for CLANG_FORMAT in "$PWD"/.venv/lib/python3*/site-packages/$binary; do
    [[ $("$CLANG_FORMAT" --version 2>/dev/null) != *" $CLANG_FORMAT_PIN"* ]] || return 0
  done
  return 1
}

setup_clang() {
  local runtime=libclang-rt-$CLANG_MAJOR-dev
  if ((OFFLINE)); then
    command -v "clang++-$CLANG_MAJOR" >/dev/null ||
      die "--offline installs nothing, and clang++-$CLANG_MAJOR, which fuzzing needs, is missing."
    return
  fi
  apt_has "$runtime" || runtime=libclang-common-$CLANG_MAJOR-dev # where Ubuntu 22.04 keeps it
  require_packages "clang-$CLANG_MAJOR" "$runtime"
}
