"""The app: what its API offers becomes modules when Django has started."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class ShopConfig(AppConfig):
    name = "django_shop"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_apcore import DjangoApcore
        from django_apcore.output import DjangoRegistryWriter

        # `apcore_scan` would write files with a key that apcore's loader refuses.
        apcore = DjangoApcore.get_instance()
        DjangoRegistryWriter().write(apcore.scan("ninja"), apcore.registry)
        post_migrate.connect(self.fill, sender=self)

    def fill(self, **_: Any) -> None:
        from shop import ITEMS

        self.get_model("Article").objects.bulk_create(self.get_model("Article")(**vars(item)) for item in ITEMS)
