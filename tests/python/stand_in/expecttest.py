"""Replaces the package of this name if it is not installed: PyTorch's suite derives its tests from this class, but the
tests that run here do not use its methods."""

import unittest


class TestCase(unittest.TestCase):
    pass
