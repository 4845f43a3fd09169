"""Checks that a source distribution and a wheel hold what they must, and nothing else.

python tools/check_dist.py SDIST WHEEL...

Run it in the git checkout that the sdist was built from: the sdist holds the files that git knows.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser

NOT_IN_SDIST = re.compile(r"\.gitignore|\.ci/.*")
ADDED_TO_SDIST = re.compile(r"PKG-INFO|setup\.cfg|src/msda_cpu\.egg-info/.*")
IN_WHEEL = re.compile(r"src/(msda/.*\.(py|pyi)|msda/py\.typed)")
EXTENSION = re.compile(r"(msda/_kernels/_\w+)\.[\w.-]+\.so")
EXTENSIONS_ALWAYS = {"msda/_kernels/_system", "msda/_kernels/_baseline"}
METADATA = {
    "Name": ["msda-cpu"],
    "License-Expression": ["BSD-3-Clause"],
    "License-File": ["LICENSE"],
    "Requires-Python": [">=3.11"],
    "Description-Content-Type": ["text/markdown"],
    "Requires-Dist": ["numpy>=2.0"],
}


def main(sdist: str, *wheels: str) -> int:
    """Check the files named, print what is wrong, and return how many things are."""
    tracked = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    known = {name for name in tracked.split("\0") if name and not NOT_IN_SDIST.fullmatch(name)}
    in_wheel = {match[1] for name in known if (match := IN_WHEEL.fullmatch(name))}
    faults = check_sdist(sdist, known)
    for wheel in wheels:
        faults += check_wheel(wheel, in_wheel)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(
            f"{sdist}: {len(known)} files of the project; {', '.join(wheels)}: {len(in_wheel)} and extensions"
        )
    return len(faults)


def check_sdist(path: str, known: set[str]) -> list[str]:
    """Compare an sdist with the files that git knows."""
    with tarfile.open(path) as archive:
        members = [member.name.partition("/") for member in archive if member.isfile()]
        top = members[0][0]
        names = {name for _, _, name in members if not ADDED_TO_SDIST.fullmatch(name)}
        metadata = archive.extractfile(f"{top}/PKG-INFO")
        assert metadata is not None
        faults = check_metadata(path, Parser().parsestr(metadata.read().decode()))
    faults += [f"{path}: {name} is missing" for name in sorted(known - names)]
    faults += [f"{path}: {name} does not belong there" for name in sorted(names - known)]
    return faults


def check_wheel(path: str, in_wheel: set[str]) -> list[str]:
    """Compare a wheel with the Python files of the package; beyond them it has extensions and metadata."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        faults = check_metadata(path, Parser().parsestr(archive.read(f"{info}/METADATA").decode()))
        if "Root-Is-Purelib: false" not in archive.read(f"{info}/WHEEL").decode().splitlines():
            faults.append(f"{path}: it is not marked as made for one platform")
        if "msda = msda.cli:main" not in archive.read(f"{info}/entry_points.txt").decode().splitlines():
            faults.append(f"{path}: it does not install the command msda")
    extensions = {name: match[1] for name in names if (match := EXTENSION.fullmatch(name))}
    expected = in_wheel | set(extensions)
    names = {name for name in names if not name.startswith(f"{info}/")}
    faults += [f"{path}: {name} is missing" for name in sorted(in_wheel - names)]
    faults += [f"{path}: {name} does not belong there" for name in sorted(names - expected)]
    faults += [
        f"{path}: the module {name} is missing"
        for name in sorted(EXTENSIONS_ALWAYS - set(extensions.values()))
    ]
    return faults


def check_metadata(path: str, metadata: Message) -> list[str]:
    """Compare the fields that users and tools rely on. What extras require is left open."""
    faults = []
    for field, expected in METADATA.items():
        found = [value for value in metadata.get_all(field, []) if "extra ==" not in value]
        if found != expected:
            faults.append(f"{path}: {field} is {found}, expected {expected}")
    return faults


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]) != 0)
