"""The version of this package, from its one place: the installed metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("recserve")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0.0.0"
