"""The English in packages: docstrings and documentation of installed packages or of unpacked sources.

No package is imported or run.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from pathlib import Path

from moe.data.docstrings import (
    PACKAGE_LICENCES,
    SKIPPED_FOLDERS,
    Package,
    docstring_documents,
    file_document,
    garbage_collector_paused,
    package_folder,
    topic_documents,
)
from moe.data.documents import OWN_LICENCE, Document
from moe.data.prose import prose_paragraphs
from moe.errors import DataError, did_you_mean
from moe.parsing import printable, read_text

logger = logging.getLogger(__name__)

PAGE_SUFFIXES = (".rst", ".md")
_MOST_LICENCE = 80  # characters: some packages give the whole text as the name of their licence


def read_packages(names: Sequence[str]) -> list[Document]:
    """Returns the English prose of packages: a document per file, of docstrings or of a page.

    Pages are files in reStructuredText or Markdown. Test code is left out.

    Args:
        names: Each the name of an installed package as in `import`, or of its distribution; or
            "stdlib", with which come the topics of the language reference; or the path of a folder
            of sources, with a / in it.

    Raises:
        DataError: When one is not installed as a folder of source files, or the folder does not
            exist, or there is no prose at all.
    """
    # Find all of them before reading any.
    packages: list[Package] = []
    for name in dict.fromkeys(names):
        packages += _find_packages(name)

    documents: list[Document] = []
    with garbage_collector_paused():
        for package in dict.fromkeys(packages):
            if package.name == "stdlib":
                documents += topic_documents()
            documents += docstring_documents(package)
            documents += _page_documents(package)
    if not documents:
        raise DataError(
            f"There is no prose in {', '.join(names) or 'an empty list of packages'}. Name packages "
            "with docstrings, e.g. stdlib."
        )
    return documents


def _find_packages(name: str) -> list[Package]:
    """Returns the packages of a name: several where a distribution has more than one."""
    if name == "stdlib":
        return [Package(name, package_folder(name), PACKAGE_LICENCES[name])]
    if "/" in name or os.sep in name:
        return [_unpacked_package(Path(name))]

    # An import name, else the name of a distribution; the two often differ.
    distributions = packages_distributions()
    import_names = [name] if name.isidentifier() and _has_folder(name) else []
    if not import_names:
        wanted = _canonical(name)
        for import_name, owners in distributions.items():
            if wanted in map(_canonical, owners) and _has_folder(import_name):
                import_names.append(import_name)
    if not import_names:
        raise DataError(
            f"The package {name!r} is not installed as a folder of source files."
            f"{did_you_mean(name, distributions)} Install it, leave it out, or give the path of a "
            "folder of sources, with a / in it."
        )

    # With the licence of the distribution that contains it.
    packages = []
    for import_name in sorted(import_names):
        licence = _installed_licence(import_name, distributions.get(import_name, []))
        packages.append(Package(import_name, package_folder(import_name), licence))
    return packages


def _canonical(name: str) -> str:
    return name.casefold().replace("_", "-").replace(".", "-")


def _has_folder(import_name: str) -> bool:
    try:
        package_folder(import_name)
    except DataError:
        return False
    return True


def _unpacked_package(folder: Path) -> Package:
    """Returns the package of an unpacked source distribution, or of any folder of sources."""
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder. Give the folder of an unpacked source distribution, or the name of an "
            "installed package."
        )
    name = printable(folder.resolve().name)
    return Package(name, folder, stated_licence(Distribution.at(folder)))


def _installed_licence(import_name: str, distribution_names: Sequence[str]) -> str:
    """Returns the licences of the distributions that contain a package."""
    # Several distributions may put files into one package.
    licences = {}
    for name in distribution_names or (import_name,):
        try:
            licences[stated_licence(distribution(name))] = None
        except PackageNotFoundError:
            continue
    return " AND ".join(licences) or OWN_LICENCE


def stated_licence(package: Distribution) -> str:
    """Returns the licence that the metadata of a distribution states, or "not stated".

    The SPDX expression comes first, then a short name, then the classifiers.
    """
    metadata = package.metadata
    expressions = metadata.get_all("License-Expression")
    if expressions:
        return expressions[0]
    licence = " ".join(" ".join(metadata.get_all("License") or ()).split())
    if licence and licence.casefold() != "unknown" and len(licence) <= _MOST_LICENCE:
        return licence

    # License :: OSI Approved :: BSD License
    licences = []
    for classifier in metadata.get_all("Classifier") or ():
        parts = classifier.split(" :: ")
        if parts[0] == "License" and parts[-1] != "OSI Approved":
            licences.append(parts[-1])
    return " AND ".join(licences) or OWN_LICENCE


def _page_documents(package: Package) -> Iterator[Document]:
    """Yields the documentation files among the sources of a package, a document per page."""
    pages = []
    for suffix in PAGE_SUFFIXES:
        for path in package.folder.rglob(f"*{suffix}"):
            parts = path.relative_to(package.folder).parts
            if SKIPPED_FOLDERS.isdisjoint(parts) and path.is_file():
                pages.append(path)

    # One page in another encoding should not abort the command.
    for path in sorted(pages):
        try:
            text = read_text(path)
        except DataError as error:
            logger.warning("%s is left out: %s", path, error)
            continue
        paragraphs = prose_paragraphs(text)
        if paragraphs:
            yield file_document(package, path, paragraphs)
