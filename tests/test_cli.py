"""The command line."""

import hashlib
import io
import os
import re
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import msda
from msda.cli import cases, main, workloads
from msda.cli.digests import digest

DATA = Path(__file__).parent / "data"
RESULTS = ("output", "grad_value", "grad_sampling_locations", "grad_attention_weights")
FLOATS = ("value", "sampling_locations", "attention_weights", "grad_output")

# Of the recipes' float arrays, and of the decoder's results by definition 1 of the numerics.
RECIPE_DIGESTS = {
    "encoder": {
        "value": "dad528293a270e6f488d9ee5634b63576f0a572f091be8eba602c37781a11187",
        "sampling_locations": "1645c8a4e4cf3f119d611b5d481b57fc6dfd49317d06005fe9b90818c3c6a01f",
        "attention_weights": "63cf4d160edbf98b368cb4fd7a770dd86864d30ced1c913499dbf3e3e0d90ca1",
        "grad_output": "4e64db17eed2e86ca51070aed8950ce90c94110c3754d1b47388c910fa48fc0e",
    },
    "encoder_random": {
        "value": "1ebd34676ae483d16f5e0e37a680bc85a7def850ac22c15adc0e1758b0c925e0",
        "sampling_locations": "9e04580894ce20717957cf9ffbd23a102f21dde21c556b52cfde212684213057",
        "attention_weights": "efe7ecbba1d8ffec38be42132471ad5745f665845eb4597302d78fe5cc3f5d16",
        "grad_output": "0a50b71f2122a4ef645aec5dc75eb8f00500fb6cbd0fb9b40a4fb1f85825179f",
    },
    "decoder": {
        "value": "89aeb47dd8efae696218fc5a1bc651c8eb1f83346494fefbf3e54b59e10c1ab3",
        "sampling_locations": "c0447844dbc24385cb7734f6d10b990b7fa4a4565531749e216bd7c4d54d7d19",
        "attention_weights": "f3c78075e0a6bed35e8410a41264fc084537500a75fe3efe875c97957ab41173",
        "grad_output": "8c0857a18c71b999092de61c9a59291e72d2f6736f9f30530efcf48ffee32d53",
    },
    "mask2former": {
        "value": "fd1b1ee82e5c056dc68e77ef4b14082374c8e70c916ee622568d568fe34e24c6",
        "sampling_locations": "d9c533a6c74b1330fb1cb25b7af44bd4c91b1e0b755b0332e8622e638ba3ad56",
        "attention_weights": "27885b553615b911379b1956ca3d2275b62f71c70f87ae280b1a30e9d0937cfe",
        "grad_output": "0042df75177334b715f926e8cde49a75e9ee950b4a8de9ddb01bae163abbe5d9",
    },
    "bev": {
        "value": "6b15e3bd0b3fb9ddbebd2433053b426f485d73cb89b9f7e455002614de0dca3e",
        "sampling_locations": "eaacf5d483aeea6ad8fa3caf7152c0bc8e7ef98a9e1b6d83110029114700d2cc",
        "attention_weights": "9c747a738047af0223ae39fc512d5df2a2f614f207974bc4fb1406255424b086",
        "grad_output": "9d6dbf086a9d4c26c0504b182f47a77697171523a02444a51ed0bf29e6f75e83",
    },
    "small": {
        "value": "e5e75e0ed10a16e94acc651f0947dbb0ea5b09de87e5d1d9dea5ff2c72222bc4",
        "sampling_locations": "d70c9732d9d470e8fd7ca3f520d0e6fdf554cb9c29ee65c7a1a479786dff4b8d",
        "attention_weights": "cdbdd399bb0a908cb45d0e7b2843668b15e53daf94a954af895c6e33c6f0c8a9",
        "grad_output": "b272587045c4d8cf1b6d9664153557275f547236ae28d24b0f09914a70ca1917",
    },
}
DECODER_DIGESTS = {
    "output": "4731cd3f8df5bccca8a9c88b5ba51507bcd5e620ecf9f8eda309872a07bbdbef",
    "grad_value": "6b361457b880da07a5c83617a0752f12713beab86d17e3b1f6426b6efe0d4105",
    "grad_sampling_locations": "7521dc69cdadaaa846f3fb9c21d02c3860c7d01323db0bd1b4e5c66f91d53eed",
    "grad_attention_weights": "a280d7b9fe2491b750fd831288260531a4ba8a72e0ce79a1599e337184c6eb40",
}


@pytest.fixture
def case():
    """The smallest workload's inputs."""
    return workloads.make("small")


@pytest.fixture
def case_path(case, tmp_path):
    """The same in a file, alone in a folder."""
    (tmp_path / "case").mkdir()
    path = tmp_path / "case" / "case.npz"
    np.savez(path, **case)
    return path


@pytest.fixture
def folder(tmp_path):
    """A folder for results."""
    path = tmp_path / "results"
    path.mkdir()
    return path


def command(*arguments, shell='exec "$@"', environment=None, **options):
    """Run the command line in a process of its own, started by a line of shell."""
    # With PYTHONUNBUFFERED nothing would be left to flush at the end.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-m", "msda", *map(str, arguments)],
        env=inherited | (environment or {}),
        timeout=120,
        check=False,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options,
    )


def error_line(capsys, *arguments):
    """Run `msda grad` in this process; it must fail with one line, which is returned."""
    assert main(["grad", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return one_error(captured.err)


def one_error(stderr):
    assert stderr.startswith("msda grad: error: ")
    assert stderr.count("\n") == 1
    assert stderr.endswith("\n")
    return stderr.removeprefix("msda grad: error: ").rstrip("\n")


def printed_digests(output):
    return {name: value for value, name in re.findall(r"^([0-9a-f]{64})  (\w+)$", output, re.MULTILINE)}


def stored(path):
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


# What grad computes, prints and writes


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.npz")))
def test_grad_gives_the_known_values(name, folder, capsys):
    results = folder / "results.npz"
    assert main(["grad", str(DATA / f"{name}.npz"), "-o", str(results)]) == 0
    computed, known = stored(results), stored(DATA / f"{name}.npz")
    assert tuple(computed) == RESULTS
    for key in RESULTS:
        assert computed[key].dtype == np.float32
        if name != "outside_and_nonfinite":
            np.testing.assert_allclose(
                computed[key], known[key], rtol=1e-4, atol=1e-4 * np.abs(known[key]).max()
            )
    assert printed_digests(capsys.readouterr().out) == {key: digest(array) for key, array in computed.items()}


def test_grad_computes_what_the_library_computes(case, case_path, folder, capsys):
    assert main(["grad", str(case_path), "-o", str(folder / "g.npz"), "--threads", "2"]) == 0
    inputs = {name: array for name, array in case.items() if name != "grad_output"}
    expected = [msda.forward(**inputs), *msda.backward(**case)]
    assert [array.tobytes() for array in stored(folder / "g.npz").values()] == [a.tobytes() for a in expected]
    assert list(printed_digests(capsys.readouterr().out).values()) == [
        hashlib.sha256(array.tobytes()).hexdigest() for array in expected
    ]


def test_the_printed_tables(case_path, capsys):
    assert main(["grad", str(case_path), "--threads", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert max(map(len, lines[1:])) <= 100
    assert lines[0] == f"case {case_path}"
    assert lines[2].split() == ["shape", "dtype", "L2", "norm"]
    assert [line.split()[0] for line in lines[3:7]] == list(RESULTS)
    assert re.split(" {2,}", lines[3])[:3] == ["output", "(1, 100, 64)", "float32"]
    assert lines[8] == "SHA-256 (numerics 1)"
    times = (
        r"forward [\d.]+ (ms|s), backward [\d.]+ (ms|s) \(one call each, not warmed up; threads: at most 2\)"
    )
    assert re.fullmatch(times, lines[-1])


def test_norms(capsys, case, tmp_path):
    case["grad_output"][:] *= np.float32(2.0**100)  # squares pass float32's range
    np.savez(tmp_path / "large.npz", **case)
    assert main(["grad", str(tmp_path / "large.npz")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("grad_value "))
    norm = np.linalg.norm(msda.backward(**case).value.astype(np.float64))
    assert float(row.split()[-1]) == pytest.approx(norm, rel=1e-5)


def test_without_a_case_the_decoder_is_made(folder, capsys):
    assert main(["grad", "-o", str(folder / "g.npz")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "decoder case made from a fixed recipe: its digests are the same on every machine\n"
    )
    assert printed_digests(out) == DECODER_DIGESTS
    assert {name: digest(array) for name, array in stored(folder / "g.npz").items()} == DECODER_DIGESTS


def test_neither_threads_nor_time_change_a_byte_of_the_file(case_path, folder):
    for name, threads in (("1", "1"), ("2", "2"), ("again", "2")):
        assert main(["grad", str(case_path), "-o", str(folder / name), "--threads", threads]) == 0
    first, *others = (path.read_bytes() for path in sorted(folder.iterdir()))
    assert others == [first, first]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtype(dtype, case, case_path, folder, capsys):
    assert main(["grad", str(case_path), "-o", str(folder / "g.npz"), "--dtype", dtype]) == 0
    assert f"(floats rounded to {dtype})" in capsys.readouterr().out.splitlines()[0]
    rounded = {name: array.astype(dtype) if name in FLOATS else array for name, array in case.items()}
    results = stored(folder / "g.npz")
    assert {array.dtype.name for array in results.values()} == {dtype}
    assert results["grad_value"].tobytes() == msda.backward(**rounded).value.tobytes()


def test_casting_leaves_integers_alone_and_rounds_once(case):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    # Through float32 this would be a tie, and so 1.
    case["value"] = np.full(case["value"].shape, 1 + 2.0**-8 + 2.0**-40)
    case["grad_output"] = case["grad_output"].astype(">f4")
    rounded = cases.cast(case, np.dtype(bfloat16))
    assert [rounded[name].dtype.name for name in FLOATS] == ["bfloat16"] * 4
    assert set(rounded["value"].astype(np.float64).flat) == {1 + 2.0**-7}
    assert rounded["grad_output"].tobytes() == case["grad_output"].astype(bfloat16).tobytes()
    assert rounded["spatial_shapes"].dtype == np.int64
    assert np.isinf(cases.cast({"value": np.array([1e6])}, np.dtype(np.float16))["value"]).all()


def test_bfloat16_goes_in_as_numpy_stores_it_and_comes_out_as_float32(case, tmp_path, capsys):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rounded = {name: array.astype(bfloat16) if name in FLOATS else array for name, array in case.items()}
    np.savez(tmp_path / "bfloat16.npz", **rounded)
    np.savez(tmp_path / "float32.npz", **case)
    outputs = []
    for arguments in (["bfloat16.npz"], ["float32.npz", "--dtype", "bfloat16"]):
        arguments[0] = str(tmp_path / arguments[0])
        assert main(["grad", *arguments, "-o", str(tmp_path / "g.npz")]) == 0
        out = capsys.readouterr().out
        results = stored(tmp_path / "g.npz")
        assert {array.dtype.name for array in results.values()} == {"float32"}
        assert results["grad_value"].astype(bfloat16).tobytes() == msda.backward(**rounded).value.tobytes()
        assert out.count("bfloat16  ") == 4
        outputs.append(printed_digests(out))
        assert outputs[-1] == {name: digest(array.astype(bfloat16)) for name, array in results.items()}
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("stored_so", [False, True])
def test_bfloat16_without_ml_dtypes(stored_so, case, case_path, capsys, monkeypatch):
    arguments = ["--dtype", "bfloat16"]
    if stored_so:
        case["value"] = case["value"].view(np.uint16)[..., ::2].copy().view("V2")
        np.savez(case_path, **case)
        arguments = []
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    message = error_line(capsys, case_path, *arguments)
    assert message == "bfloat16 needs the package ml_dtypes: pip install ml_dtypes"


def test_the_results_get_exactly_the_given_name(case_path, folder):
    for name in ("plain", "with.dots.npz", "r\u00e9sultat"):
        assert main(["grad", str(case_path), "-o", str(folder / name)]) == 0
    assert sorted(os.listdir(folder)) == ["plain", "r\u00e9sultat", "with.dots.npz"]


def test_an_existing_file_is_replaced_and_keeps_its_permissions(case_path, folder):
    old = folder / "g.npz"
    old.write_bytes(b"old")
    old.chmod(0o640)
    (folder / "link.npz").symlink_to(old)
    assert main(["grad", str(case_path), "-o", str(folder / "link.npz")]) == 0
    assert (folder / "link.npz").is_symlink()
    assert tuple(stored(old)) == RESULTS
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_a_new_file_has_the_usual_permissions(case_path, folder):
    (folder / "usual").touch()
    assert main(["grad", str(case_path), "-o", str(folder / "g.npz")]) == 0
    assert (folder / "g.npz").stat().st_mode == (folder / "usual").stat().st_mode


def test_a_device_can_be_written_to(case_path):
    assert main(["grad", str(case_path), "-o", os.devnull]) == 0
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_pipe_can_be_written_to(case_path, folder):
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    received = folder / "received"
    # Into a file: the results are more than a pipe holds, and nobody reads one before the command is done.
    with received.open("wb") as file, subprocess.Popen(["cat", fifo], stdout=file):
        assert command("grad", case_path, "-o", fifo).returncode == 0
    assert tuple(stored(received)) == RESULTS


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="needs /dev/stdout")
def test_standard_output_can_be_written_to(case_path):
    done = command("grad", case_path, "-o", "/dev/stdout", text=False)
    assert done.returncode == 0
    assert done.stdout.startswith(b"PK")


# Cases that cannot be read


def change(path, **arrays):
    """Store the case again with other arrays; None leaves one out."""
    kept = {name: array for name, array in (stored(path) | arrays).items() if array is not None}
    np.savez(path, **kept)


def replace_member(path, name, data):
    """Put other bytes in place of one .npy file in the case."""
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in (members | {name: data}).items():
            archive.writestr(member, content)


def header(shape, descr="<f4"):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def test_extra_keys_are_not_looked_at(case_path):
    change(case_path, note=np.array({"a": 1}, dtype=object))
    assert main(["grad", str(case_path)]) == 0


def test_a_case_that_is_not_there(tmp_path, capsys):
    path = tmp_path / "none.npz"
    assert error_line(capsys, path) == f"cannot read {path}: No such file or directory"


def test_a_directory_as_case(tmp_path, capsys):
    assert error_line(capsys, tmp_path) == f"cannot read {tmp_path}: Is a directory"


def test_a_case_without_permission(case_path, capsys):
    case_path.chmod(0)
    if os.access(case_path, os.R_OK):
        pytest.skip("this user may read everything")
    assert error_line(capsys, case_path) == f"cannot read {case_path}: Permission denied"


def test_a_name_with_odd_characters(tmp_path, capsys):
    assert main(["grad", str(tmp_path / "a\nb\udcff.npz")]) == 2
    captured = capsys.readouterr()
    assert r"a\nb\udcff.npz" in one_error(captured.err)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"hello\n" * 100, header((2,)) + bytes(8)])
def test_what_is_no_archive(content, case_path, capsys):
    case_path.write_bytes(content)
    assert error_line(capsys, case_path).startswith(f"{case_path} is not a complete .npz file: ")


@pytest.mark.parametrize("kept", [0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_case(kept, case_path, capsys):
    content = case_path.read_bytes()
    case_path.write_bytes(content[: int(kept * len(content))])
    assert "is not a complete .npz file" in error_line(capsys, case_path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_case_is_read_right_or_refused(save, tmp_path):
    case = stored(DATA / "document_example.npz")
    path = tmp_path / "damaged.npz"
    save(path, **{name: case[name] for name in cases.INPUTS})
    content = path.read_bytes()
    refused = 0
    for position in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            read = cases.read(str(path))
        except cases.CommandError:
            refused += 1
        else:
            assert all(read[name].tobytes() == case[name].tobytes() for name in cases.INPUTS)
    assert refused > len(content) / 7 / 2


@pytest.mark.parametrize("name", cases.INPUTS)
def test_a_missing_key(name, case_path, capsys):
    change(case_path, **{name: None})
    assert error_line(capsys, case_path).startswith(f"{case_path} lacks {name}; ")


def test_several_missing_keys(case_path, capsys):
    np.savez(case_path, value=np.zeros(1), spatial_shapes=np.ones((1, 2)))
    message = error_line(capsys, case_path)
    assert " lacks level_start_index, sampling_locations, attention_weights, grad_output; " in message


class Unpickled:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, (self.trace,))


def test_nothing_is_unpickled(case_path, tmp_path, capsys):
    bomb = Unpickled()
    bomb.trace = str(tmp_path / "trace")
    change(case_path, value=np.array([bomb], dtype=object))
    assert error_line(capsys, case_path).endswith("value holds pickled Python objects, which are not loaded")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            header((10**12,)) + bytes(8),
            "value should have 4000000000000 bytes of data by its header, and has 8",
        ),
        (header((10**30,)), "value should have 4" + "0" * 30 + " bytes of data by its header, and has 0"),
        (header((-2,)) + bytes(8), "value should have -8 bytes of data by its header, and has 8"),
        (header((2,)) + bytes(12), "value should have 8 bytes of data by its header, and has 12"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 10**8, "EOF: reading array header"),
        (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, "EOF: reading array header"),
        (b"\x93NUMPY\x01\x00\xe8\x03" + b"(" * 1000, "not a complete .npz file"),
        (b"\x93NUMPY\x03\x00" + bytes(100), "value has the .npy version (3, 0)"),
        (b"\x93NUMPY\x07\x00" + bytes(100), "value has the .npy version (7, 0)"),
        (b"\x93NUMPY", "EOF: reading magic string"),
        (b"", "EOF: reading magic string"),
        (header((), descr="<x9"), "descr is not a valid dtype descriptor"),
    ],
)
def test_a_header_that_lies(data, message, case_path, capsys):
    replace_member(case_path, "value.npy", data)
    assert message in error_line(capsys, case_path)


@pytest.mark.parametrize(
    ("name", "array", "error"),
    [
        ("value", np.zeros((1, 320, 4), np.float32), ValueError),
        ("value", np.zeros((1, 319, 4, 16), np.float32), ValueError),
        ("value", np.zeros((1, 320, 4, 16), np.int32), TypeError),
        ("value", np.zeros((1, 320, 4, 16), "U3"), TypeError),
        ("grad_output", np.zeros((1, 100, 63), np.float32), ValueError),
        ("spatial_shapes", np.zeros((2, 2), "V2"), TypeError),
        ("level_start_index", np.array([0, 300]), ValueError),
    ],
)
def test_the_library_says_what_does_not_fit(name, array, error, case, case_path, capsys):
    change(case_path, **{name: array})
    with pytest.raises(error) as raised:
        msda.backward(**case | {name: array})
    assert error_line(capsys, case_path) == f"{case_path}: {' '.join(str(raised.value).split())}"


def test_too_little_memory(case_path, capsys, monkeypatch):
    def backward(*args, **kwargs):
        raise MemoryError("Unable to allocate 1. TiB")

    monkeypatch.setattr(msda, "backward", backward)
    assert error_line(capsys, case_path) == "not enough memory: Unable to allocate 1. TiB"


# Results that cannot be written


@pytest.fixture
def nothing_computed(monkeypatch):
    """What cannot be written is found out before anything is computed."""

    def forward(*args, **kwargs):
        raise AssertionError("computed")

    monkeypatch.setattr(msda, "forward", forward)


@pytest.mark.usefixtures("nothing_computed")
def test_a_folder_that_is_not_there(case_path, folder, capsys):
    path = folder / "none" / "g.npz"
    assert error_line(capsys, case_path, "-o", path) == f"cannot write {path}: No such file or directory"
    assert os.listdir(folder) == []


@pytest.mark.usefixtures("nothing_computed")
def test_a_file_as_folder(case_path, capsys):
    path = case_path / "g.npz"
    assert error_line(capsys, case_path, "-o", path) == f"cannot write {path}: Not a directory"


@pytest.mark.usefixtures("nothing_computed")
def test_a_folder_as_file(case_path, folder, capsys):
    for path in (folder, f"{folder}/new/", ""):
        assert error_line(capsys, case_path, "-o", path) == f"cannot write {path}: Is a directory"


@pytest.mark.usefixtures("nothing_computed")
def test_a_name_that_is_too_long(case_path, folder, capsys):
    path = folder / ("x" * 300)
    assert error_line(capsys, case_path, "-o", path) == f"cannot write {path}: File name too long"


@pytest.mark.usefixtures("nothing_computed")
def test_results_without_permission(case_path, folder, capsys):
    (folder / "old.npz").write_bytes(b"old")
    (folder / "old.npz").chmod(0o444)
    if os.access(folder / "old.npz", os.W_OK):
        pytest.skip("this user may write everything")
    message = error_line(capsys, case_path, "-o", folder / "old.npz")
    assert message == f"cannot write {folder / 'old.npz'}: Permission denied"
    folder.chmod(0o555)
    message = error_line(capsys, case_path, "-o", folder / "g.npz")
    assert message == f"cannot write {folder / 'g.npz'}: Permission denied"
    assert (folder / "old.npz").read_bytes() == b"old"


@pytest.mark.usefixtures("nothing_computed")
def test_the_case_is_not_overwritten(case_path, folder, capsys):
    before = case_path.read_bytes()
    (folder / "link.npz").symlink_to(case_path)
    for path in (case_path, folder / "link.npz"):
        message = error_line(capsys, case_path, "-o", path)
        assert message == f"{path} is the case itself: choose another file for the results"
    assert case_path.read_bytes() == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_device(case_path):
    done = command("grad", case_path, "-o", "/dev/full")
    assert done.returncode == 2
    assert one_error(done.stderr) == "cannot write /dev/full: No space left on device"
    assert done.stdout == ""


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_disk_that_fills_up(old, case_path, folder):
    path = folder / "g.npz"
    if old is not None:
        path.write_bytes(old)
    # Shells count in units of 512 or 1024 bytes; the results take about 150 000.
    done = command("grad", case_path, "-o", path, shell='ulimit -f 100 && exec "$@"')
    assert done.returncode == 2
    assert one_error(done.stderr) == f"cannot write {path}: File too large"
    assert done.stdout == ""
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == (
        {} if old is None else {"g.npz": old}
    )


# How the process ends


@pytest.mark.parametrize("old", [None, b"old"])
def test_an_interruption_while_writing_leaves_nothing(old, case_path, folder, capsys, monkeypatch):
    path = folder / "g.npz"
    if old is not None:
        path.write_bytes(old)
    write_array, seen = np.lib.format.write_array, []

    def interrupted(file, array, **options):
        write_array(file, array, **options)
        seen.append(sorted(os.listdir(folder)))
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(np.lib.format, "write_array", interrupted)
    assert main(["grad", str(case_path), "-o", str(path)]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert any(name.startswith(".msda-") for name in seen[-1])
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == (
        {} if old is None else {"g.npz": old}
    )


def test_an_interruption_while_computing(case_path, folder, capsys, monkeypatch):
    monkeypatch.setattr(msda, "backward", lambda *args, **kwargs: signal.raise_signal(signal.SIGINT))
    assert main(["grad", str(case_path), "-o", str(folder / "g.npz")]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert os.listdir(folder) == []


@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_closed_pipe_is_no_news(environment, case_path, folder):
    reader, writer = os.pipe()
    os.close(reader)
    done = command("grad", case_path, "-o", folder / "g.npz", environment=environment, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert tuple(stored(folder / "g.npz")) == RESULTS


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["info"], ["--help"], ["grad", DATA / "document_example.npz"]])
def test_standard_output_that_is_full(arguments):
    with open("/dev/full", "wb") as full:
        done = command(*arguments, stdout=full)
    assert done.returncode == 2
    assert re.fullmatch(
        r"msda( \w+)?: error: cannot write to standard output: No space left on device\n", done.stderr
    )


def test_standard_output_that_is_closed(case_path):
    done = command("grad", case_path, shell='exec "$@" >&-')
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_standard_output_cannot_show(case_path):
    path = case_path.with_name("caf\u00e9.npz")
    case_path.rename(path)
    done = command("grad", path, environment={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].endswith(r"caf\xe9.npz")


# The rest of the command line


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"msda {msda.__version__}\n"


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: msda ")
    assert "grad " in captured.err
    assert "info " in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["grad", "--threads", "0"], "argument --threads: expected an integer of at least 1, got '0'"),
        (["grad", "--threads", "two"], "argument --threads: expected an integer of at least 1, got 'two'"),
        (["grad", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["grad", "a.npz", "b.npz"], "unrecognized arguments: b.npz"),
    ],
)
def test_a_wrong_command_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_the_module_runs_as_a_program():
    done = command("grad", DATA / "document_example.npz")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(printed_digests(done.stdout)) == list(RESULTS)


def test_info(capsys):
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = msda.runtime_info()
    assert len(lines) == len(found)
    assert lines[0].split() == ["version", msda.__version__]
    starts = {line.index(line.split("  ")[-1].lstrip()) for line in lines}
    assert len(starts) == 1


def test_info_says_what_is_wrong_with_the_environment():
    done = command("info", environment={"MSDA_NUM_THREADS": "many"})
    assert done.returncode == 2
    assert done.stderr.startswith("msda info: error: ")
    assert "MSDA_NUM_THREADS" in done.stderr
    assert done.stderr.count("\n") == 1


# Recipes and digests


def test_splitmix64_is_the_published_generator():
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert workloads.splitmix64(0, 3).tolist() == outputs
    assert workloads.splitmix64(0, 2, first=1).tolist() == outputs[1:]


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_recipes(name):
    made = workloads.make(name)
    assert tuple(made) == cases.INPUTS
    assert {array: digest(made[array]) for array in FLOATS} == RECIPE_DIGESTS[name]


SHAPES = {
    "encoder": (1, [(100, 167), (50, 84), (25, 42), (13, 21)], 22223, 8, 32),
    "encoder_random": (1, [(100, 167), (50, 84), (25, 42), (13, 21)], 22223, 8, 32),
    "decoder": (2, [(100, 167), (50, 84), (25, 42), (13, 21)], 300, 8, 32),
    "mask2former": (1, [(32, 32), (64, 64), (128, 128)], 21504, 8, 32),
    "bev": (1, [(200, 200)], 40000, 8, 32),
    "small": (1, [(16, 16), (8, 8)], 100, 4, 16),
}


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_what_the_recipes_make(name):
    batch, levels, num_queries, heads, channels = SHAPES[name]
    made = workloads.make(name)
    sizes = [height * width for height, width in levels]
    samples = (batch, num_queries, heads, len(levels), 4)
    assert made["spatial_shapes"].tolist() == [list(level) for level in levels]
    assert made["level_start_index"].tolist() == [sum(sizes[:level]) for level in range(len(levels))]
    assert {made[array].dtype for array in FLOATS} == {np.dtype(np.float32)}
    assert made["value"].shape == (batch, sum(sizes), heads, channels)
    assert made["grad_output"].shape == (batch, num_queries, heads * channels)
    assert made["sampling_locations"].shape == (*samples, 2)
    assert made["attention_weights"].shape == samples

    few = 5 / np.sqrt(made["grad_output"].size)  # five standard errors of a mean
    for array in ("value", "grad_output"):
        assert abs(made[array].mean(dtype=np.float64)) < few
        assert abs(made[array].var(dtype=np.float64) - 1) < 2 * few
    weights = made["attention_weights"].astype(np.float64)
    assert weights.min() > 0
    np.testing.assert_allclose(weights.sum(axis=(-2, -1)), 1, rtol=1e-6)

    locations = made["sampling_locations"].astype(np.float64)
    if name in ("encoder_random", "decoder", "small"):
        assert locations.min() >= 0
        assert locations.max() < 1
        assert abs(locations.mean() - 0.5) < 5 / np.sqrt(12 * locations.size)
        return
    query = 0
    for height, width in levels:
        for x, y in ((0, 0), (width - 1, height - 1), (width // 2, height // 3)):
            offsets = locations[0, query + y * width + x] - [(x + 0.5) / width, (y + 0.5) / height]
            pixels = offsets * made["spatial_shapes"][:, np.newaxis, ::-1]
            assert np.abs(pixels).max() < 3 * 3.5
            assert abs(pixels.mean()) < 5 * 3 / np.sqrt(pixels.size)
            assert abs(pixels.std() - 3) < 5 * 3 / np.sqrt(2 * pixels.size)
        query += height * width
    assert query == num_queries


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "<i8", "u1"])
def test_a_digest_is_that_of_the_bytes_in_c_order(dtype):
    array = np.arange(-60, 60).reshape(4, 5, 6).astype(dtype)
    expected = hashlib.sha256(array.tobytes()).hexdigest()
    assert digest(array) == expected
    for same in (
        np.asfortranarray(array),
        np.ascontiguousarray(array.T).T,
        np.repeat(array, 2, axis=1)[:, ::2],
        array.astype(array.dtype.newbyteorder(">")),
        array.reshape(-1),
    ):
        assert digest(same) == expected


def test_digests_of_large_arrays():
    array = workloads.make("decoder")["value"]
    assert digest(array) == hashlib.sha256(array).hexdigest()
    assert digest(np.zeros((0, 3), np.float32)) == hashlib.sha256().hexdigest()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_digests_write_every_nan_alike_and_nothing_else(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    bits = np.dtype(f"<u{np.dtype(dtype).itemsize}")
    infinity = np.array([np.inf]).astype(dtype).view(bits)[0]
    sign = bits.type(1) << bits.type(8 * bits.itemsize - 1)
    quiet = np.array([np.nan]).astype(dtype).view(bits)[0] & ~sign

    def of(*elements):
        return digest(np.array(elements, bits).view(dtype))

    for nan in (quiet, quiet | sign, infinity + 1, (infinity + 1) | sign, ~sign, ~sign | sign):
        assert of(0, nan, 1) == hashlib.sha256(np.array([0, quiet, 1], bits).tobytes()).hexdigest()
    different = [of(quiet), of(infinity), of(infinity | sign), of(0), of(sign), of(1), of(infinity - 1)]
    assert len(set(different)) == len(different)


def test_no_digest_without_a_definition():
    for array in (np.zeros(3, np.complex64), np.array(["a"]), np.zeros(3, bool)):
        with pytest.raises(TypeError, match="no digest is defined for"):
            digest(array)


def test_a_device_without_an_end_is_refused(capsys):
    assert main(["grad", "/dev/zero"]) == 2
    assert capsys.readouterr().err == "msda grad: error: cannot read /dev/zero: it is a device, not a file\n"


def test_an_output_that_no_system_takes(capsys):
    assert main(["grad", "-o", "a\0b"]) == 2
    assert "cannot write" in capsys.readouterr().err
