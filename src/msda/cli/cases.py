"""Cases: .npz files of the inputs of one call, and of its results."""

import contextlib
import io
import math
import os
import secrets
import stat
import tempfile
import types
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from msda.arguments import dtype_name
from msda.cli.errors import CommandError, shown
from msda.reference import round_to

INPUTS = (
    "value",
    "spatial_shapes",
    "level_start_index",
    "sampling_locations",
    "attention_weights",
    "grad_output",
)
FLOAT_INPUTS = tuple(name for name in INPUTS if name not in ("spatial_shapes", "level_start_index"))

_HEADER_LIMIT = 1 << 13  # bytes; the header of a plain array takes 128
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the float dtype `name`, one of `msda.arguments.FLOAT_NAMES`."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise CommandError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def read(path: str) -> dict[str, NDArray[Any]]:
    """Return the inputs in the case `path`, by the names and in the order of `msda.backward`.

    Other keys are not looked at. Nothing is ever unpickled, and no more memory is taken than the file
    has data. Whether the arrays fit together is for the library to say.
    """
    try:
        with _opened(path) as file, zipfile.ZipFile(file) as archive, warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about the spelling of headers, which is either right or an error
            members = set(archive.namelist())
            missing = [name for name in INPUTS if f"{name}.npy" not in members]
            if missing:
                needed = ", ".join(INPUTS)
                raise CommandError(f"{shown(path)} lacks {', '.join(missing)}; a case has the keys {needed}")
            case = {name: _member(archive, name) for name in INPUTS}
    except (CommandError, MemoryError):
        raise
    except Exception as error:  # zipfile, zlib, lzma and NumPy meet broken bytes with many kinds
        raise CommandError(f"{shown(path)} is not a complete .npz file: {error}") from None
    for name in FLOAT_INPUTS:
        # np.savez stores bfloat16 as raw pairs of bytes: the format has no name for it.
        if case[name].dtype.str[1:] == "V2":
            case[name] = case[name].view(dtype_named("bfloat16"))
    return case


def _opened(path: str) -> IO[bytes]:
    try:
        # Some devices have no end.
        if stat.S_ISCHR(os.stat(path).st_mode):
            raise CommandError(f"cannot read {shown(path)}: it is a device, not a file")
        return open(path, "rb")
    except OSError as error:
        raise CommandError(f"cannot read {shown(path)}: {error.strerror}") from None


def _member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Read one array, after its header has been held against the size of its data."""
    member = archive.getinfo(f"{name}.npy")
    with archive.open(member) as stream:
        header = io.BytesIO(stream.read(_HEADER_LIMIT))
    version = np.lib.format.read_magic(header)
    if version not in _HEADER_READERS:
        raise ValueError(f"{name} has the .npy version {version}, which plain arrays do not need")
    shape, _, dtype = _HEADER_READERS[version](header)
    if dtype.hasobject:
        raise ValueError(f"{name} holds pickled Python objects, which are not loaded")
    promised = math.prod(shape) * dtype.itemsize
    present = member.file_size - header.tell()
    if promised != present:
        raise ValueError(f"{name} should have {promised} bytes of data by its header, and has {present}")
    with archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def cast(case: Mapping[str, NDArray[Any]], dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
    """Return the case with its float arrays rounded to `dtype`, once and to nearest even."""
    return {name: _rounded(array, dtype) for name, array in case.items()}


def _rounded(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    name = dtype_name(array.dtype)
    if name is None:
        return array  # an integer array, or one that the library will refuse
    return round_to(array.astype(np.float64 if name == "float64" else np.float32), dtype)


def check_output(path: str, case_path: str | None) -> None:
    """Raise if `write` could not write to `path`, or if that would destroy the case itself."""
    try:
        target, mode = _target(path)
        if case_path is not None and os.path.realpath(case_path) == target:
            raise CommandError(f"{shown(path)} is the case itself: choose another file for the results")
        if mode is not None and not os.access(target, os.W_OK):
            raise PermissionError(0, "Permission denied")
        if _is_file(mode):
            with tempfile.TemporaryFile(dir=os.path.dirname(target)):
                pass
    except OSError as error:
        raise _cannot_write(path, error) from None
    except ValueError as error:  # a path that no system takes, with a NUL in it
        raise CommandError(f"cannot write {shown(path)}: {error}") from None


def write(path: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write `arrays` to the .npz file `path`: all of it, or nothing.

    A file that was there stays as it was until the new one is complete. bfloat16 is written as float32,
    which any NumPy can read and which holds it exactly. The same arrays give the same bytes.
    """
    try:
        target, mode = _target(path)
        if _is_file(mode):
            with _replacement(target, mode) as file:
                _write_archive(file, arrays)
        else:
            with open(target, "wb") as device:
                # No position to seek to: zipfile then writes from front to end.
                stream = types.SimpleNamespace(write=device.write, flush=device.flush)
                _write_archive(stream, arrays)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _target(path: str) -> tuple[str, int | None]:
    """Return the path to write to, with symbolic links to a file followed, and the mode of what is there."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    if os.path.basename(path) == "" or (mode is not None and stat.S_ISDIR(mode)):
        raise IsADirectoryError(0, "Is a directory")
    # A device stays as it is named: the links of /dev/stdout can end in what is no path.
    return (os.path.realpath(path) if _is_file(mode) else path), mode


def _is_file(mode: int | None) -> bool:
    """Whether the mode is that of a regular file, or None, of one to come."""
    return mode is None or stat.S_ISREG(mode)


@contextlib.contextmanager
def _replacement(target: str, mode: int | None) -> Iterator[IO[bytes]]:
    """Give a new file beside `target`, which takes its place at the end, or is removed on an error."""
    temporary = os.path.join(os.path.dirname(target), f".msda-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            yield file
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _write_archive(file: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            stored = array.astype(np.float32) if dtype_name(array.dtype) == "bfloat16" else array
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, stored, allow_pickle=False)


def _cannot_write(path: str, error: OSError) -> CommandError:
    return CommandError(f"cannot write {shown(path)}: {error.strerror or error}")
