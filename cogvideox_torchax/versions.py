"""Versions, tested and installed, of the packages that a result depends on."""

import importlib.metadata
from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True)
class Tested:
    """The range of versions that the tests have passed with, both ends included."""

    oldest: str
    newest: str

    def holds(self, version: str) -> bool:
        """Return whether a version is in the range.

        A build for a device (`2.13.0+cpu`) counts as its version (`2.13.0`). A later patch of `newest` is in
        the range too: a final release with the same first two numbers. It is not if these numbers are 0.0,
        since a patch of 0.0 may change anything.
        """
        public_version = Version(Version(version).public)  # without "+cpu"
        newest = Version(self.newest)
        first_two = newest.release[:2]
        same_minor = public_version.release[:2] == first_two
        is_patch_of_newest = same_minor and first_two != (0, 0) and not public_version.is_prerelease
        return public_version >= Version(self.oldest) and (public_version <= newest or is_patch_of_newest)


TESTED = {
    "torch": Tested("2.13.0", "2.15.0"),
    "torchax": Tested("0.0.14.dev20261026", "0.0.14.dev20261026"),
    "jax": Tested("0.10.2", "0.12.0.1"),
    "diffusers": Tested("0.42.1", "0.42.1"),
    "transformers": Tested("5.23.0", "5.24.0"),
}
"""By package, from the version that constraints.txt pins to the newest in the table of docs/install.md.

`doctor` reports other versions.
"""


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of packages that a figure depends on; "none" for one that is not installed."""
    return {package: installed(package) or "none" for package in packages}


def untested() -> list[str]:
    """Return a line for each installed package whose version the tests have not passed with."""
    lines = []
    for package, tested in TESTED.items():
        version = installed(package)
        if version is not None and not tested.holds(version):
            span = tested.oldest if tested.oldest == tested.newest else f"{tested.oldest} to {tested.newest}"
            lines.append(f"{package} {version} is installed, {span} is tested")
    return lines
