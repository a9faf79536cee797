"""A table of named values that a new file can extend without edits elsewhere."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from moe.checks import shown
from moe.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Named values of one kind; an unknown name raises an error with the closest name."""

    def __init__(self, kind: str, *, base: type | None = None) -> None:
        """Makes an empty table.

        Args:
            kind: Noun for its values in error messages, e.g. "router".
            base: Required base class; None if the values are not classes.
        """
        self.kind = kind
        self._base = base
        self._entries: dict[str, T] = {}

    def add(self, name: str, value: T) -> T:
        """Stores `value` under `name` and returns it.

        Raises:
            ConfigError: When the name is taken, or the value is not a class of this kind.
        """
        base = self._base
        if base is not None and not (isinstance(value, type) and issubclass(value, base)):
            raise ConfigError(
                f"The {self.kind} {name!r} is {shown(value)}; expected a subclass of "
                f"{base.__module__}.{base.__name__}."
            )
        if name in self._entries:
            raise ConfigError(
                f"There is already a {self.kind} called {name!r}. Choose another name."
            )

        self._entries[name] = value
        return value

    def register(self, name: str) -> Callable[[T], T]:
        """Returns a decorator that stores the decorated value under `name`."""

        def store(value: T) -> T:
            return self.add(name, value)

        return store

    def get(self, name: str) -> T:
        """Returns the value called `name`.

        Raises:
            ConfigError: When there is none; the message names the closest and lists all.
        """
        if not isinstance(name, str) or name not in self._entries:
            known = ", ".join(self.names()) or "none"
            closest = did_you_mean(name, self._entries)
            raise ConfigError(
                f"There is no {self.kind} called {shown(name)}.{closest} Known: {known}."
            )
        return self._entries[name]

    def names(self) -> list[str]:
        """Returns all names, sorted."""
        return sorted(self._entries)


def load_entry_point(group: str, name: str) -> Any:
    """Returns what an installed package registers in a group of entry points.

    Raises:
        ConfigError: When none does, as after a copy of files without `pip install`.
    """
    for point in entry_points(group=group, name=name):
        return point.load()
    raise ConfigError(f"No installed package registers {name!r} as {group}. Run pip install stmoe.")
