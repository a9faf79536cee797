"""Names that a user gives as one text, separated by commas."""

from moe import ConfigError


def split_names(option: str, text: str) -> list[str]:
    """Returns the names in the value of an option, each once.

    Args:
        option: As the user writes it.
        text: Its value.

    Raises:
        ConfigError: When one of them is empty.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(
            f"{option} is {text!r}, in which a name is empty; expected names separated by commas."
        )
    return list(dict.fromkeys(names))
