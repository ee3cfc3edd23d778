"""What an error says, cut so that it can stand inside a sentence of ours."""


def first_line(error: BaseException) -> str:
    """Its first line, without the rest of a long report; and the second, where the first only announces it."""
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first


def one_line(error: BaseException, most: int = 200) -> str:
    """All of it in one line, up to so many characters: for what a library or the system says in a few lines."""
    return " ".join(str(error).split())[:most] or type(error).__name__
