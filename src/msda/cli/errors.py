"""What a subcommand raises when it cannot do what was asked."""


class CommandError(Exception):
    """A failure that one line on stderr explains; the exit status is 2."""


def one_line(text: object) -> str:
    """Return `text` with every run of white space, line ends included, as one space."""
    return " ".join(str(text).split())


def shown(path: str) -> str:
    """Return `path` as it may stand in a line of text: line ends and undecodable bytes escaped."""
    return path if path.isprintable() else ascii(path)
