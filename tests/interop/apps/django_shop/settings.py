"""Settings; what belongs to one run comes from the environment."""

import os
from pathlib import Path

FOLDER = Path(os.environ["FOLDER"])
SECRET_KEY = "told to everyone"
DEBUG = True
INSTALLED_APPS = ["django_shop.apps.ShopConfig", "django_apcore"]  # whose server starts with what is there
ROOT_URLCONF = "django_shop.urls"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": FOLDER / "db.sqlite3"}}
APCORE_MODULE_DIR = str(FOLDER)
APCORE_JWT_SECRET = os.environ.get("APCORE_JWT_SECRET")
if "EMBEDDED_PORT" in os.environ:
    APCORE_EMBEDDED_SERVER = {"transport": "streamable-http", "port": int(os.environ["EMBEDDED_PORT"])}
