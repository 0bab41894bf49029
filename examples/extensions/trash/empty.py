"""Delete for good what lies in a trash, which this example keeps in memory."""

from datetime import date
from typing import Any

from apcore import Change, Context, ModuleAnnotations, ModuleExample, PreviewResult
from pydantic import BaseModel, ConfigDict, Field


class EmptyInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    deleted_before: date | None = Field(
        default=None, description="Only what was put in the trash before this day; by default everything."
    )
    dry_run: bool = Field(default=True, description="Only tell what would be deleted. Set to false to delete it.")


class TrashItem(BaseModel):
    name: str = Field(description="What the item was called.")
    deleted_on: date = Field(description="The day it was put in the trash.")
    size_bytes: int = Field(description="Its size in bytes.")


class EmptyOutput(BaseModel):
    dry_run: bool = Field(description="Whether the items are still there.")
    items: list[TrashItem] = Field(description="What was, or would be, deleted.")
    freed_bytes: int = Field(description="The space that is, or would be, freed.")


class EmptyTrash:
    name = "Empty trash"
    description = "Delete items of the trash for good. Only lists them unless dry_run is false."
    tags = ["files", "cleanup"]
    annotations = ModuleAnnotations(destructive=True, requires_approval=True, open_world=False)
    input_schema = EmptyInput
    output_schema = EmptyOutput
    examples = [
        ModuleExample(
            title="What was deleted before February",
            inputs={"deleted_before": "2025-02-01"},
            output={
                "dry_run": True,
                "items": [{"name": "draft.txt", "deleted_on": "2025-01-15", "size_bytes": 2048}],
                "freed_bytes": 2048,
            },
        )
    ]

    def __init__(self) -> None:
        self._items = [
            TrashItem(name="draft.txt", deleted_on=date(2025, 1, 15), size_bytes=2048),
            TrashItem(name="holiday.jpg", deleted_on=date(2025, 3, 2), size_bytes=3_500_000),
        ]

    def _chosen(self, args: EmptyInput) -> list[TrashItem]:
        return [i for i in self._items if args.deleted_before is None or i.deleted_on < args.deleted_before]

    def preview(self, inputs: dict[str, Any], context: Context[Any]) -> PreviewResult | None:
        args = EmptyInput.model_validate(inputs)
        if args.dry_run:
            return None
        return PreviewResult(
            changes=[
                Change(action="delete", target=item.name, summary=f"Delete {item.name} for good")
                for item in self._chosen(args)
            ]
        )

    def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        args = EmptyInput.model_validate(inputs)
        chosen = self._chosen(args)
        if not args.dry_run:
            self._items = [item for item in self._items if item not in chosen]
        freed = sum(item.size_bytes for item in chosen)
        return EmptyOutput(dry_run=args.dry_run, items=chosen, freed_bytes=freed).model_dump()
