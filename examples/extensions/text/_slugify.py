"""The function behind ``text.slugify``; ``slugify.binding.yaml`` makes a module of it."""

import re
import unicodedata


def slugify(text: str, separator: str = "-", max_length: int = 80) -> dict[str, str]:
    """Turn a title into lower-case ASCII words joined by ``separator``, cut at a word boundary."""
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    words = re.findall(r"[a-z0-9]+", ascii_text.lower())
    slug = ""
    for word in words:
        longer = f"{slug}{separator}{word}" if slug else word
        if len(longer) > max_length:
            break
        slug = longer
    return {"slug": slug or "".join(words[:1])[:max_length]}
