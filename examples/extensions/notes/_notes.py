"""Notes kept in memory; ``notes.binding.yaml`` makes modules of the public functions.

The functions share one store because a binding imports this file once, as an ordinary Python module.
"""

from typing import Annotated

from pydantic import BaseModel, Field

Title = Annotated[str, Field(min_length=1, max_length=100, description="The title, which names the note.")]


class Note(BaseModel):
    title: str = Field(description="The title, which names the note.")
    text: str = Field(description="The note itself.")
    tags: list[str] = Field(description="Words it is filed under.")


class Saved(BaseModel):
    created: bool = Field(description="True for a new note, false if one of that title was replaced.")


class Found(BaseModel):
    notes: list[Note] = Field(description="The notes found, sorted by title.")


class Deleted(BaseModel):
    deleted: bool = Field(description="False if there was no note of that title.")


_notes: dict[str, Note] = {}


def save(
    title: Title,
    text: Annotated[str, Field(max_length=10_000, description="The note itself, as plain text or Markdown.")],
    tags: Annotated[list[str] | None, Field(description="Words to file it under.")] = None,
) -> Saved:
    created = title not in _notes
    _notes[title] = Note(title=title, text=text, tags=tags or [])
    return Saved(created=created)


def search(
    query: Annotated[str, Field(description="Part of the title or text, in any case; empty finds every note.")] = "",
    tag: Annotated[str | None, Field(description="Only notes filed under this word.")] = None,
    limit: Annotated[int, Field(ge=1, le=100, description="How many notes to return at most.")] = 20,
) -> Found:
    wanted = query.casefold()
    notes = [
        note
        for _, note in sorted(_notes.items())
        if wanted in f"{note.title}\n{note.text}".casefold() and (tag is None or tag in note.tags)
    ]
    return Found(notes=notes[:limit])


def delete(title: Title) -> Deleted:
    return Deleted(deleted=_notes.pop(title, None) is not None)
