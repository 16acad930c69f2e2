"""Native builds: C sources compiled at first use by the machine's compiler, kept in a cache, loaded with ctypes."""

from .library_folder import LoadedLibrary
from .load import load_library
from .source import NativeSource, NativeUnit

__all__ = ["LoadedLibrary", "NativeSource", "NativeUnit", "load_library"]
