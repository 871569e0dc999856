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
        """Return whether a version is in the range; a device's build, `2.13.0+cpu`, counts as `2.13.0`."""
        return Version(self.oldest) <= Version(Version(version).public) <= Version(self.newest)


TESTED = {
    "torch": Tested("2.13.0", "2.14.1"),
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
