"""The settings: the store is beside the database of the project."""

from __future__ import annotations

import os

from framework_crew import TTL_S

SECRET_KEY = "of the tests"
INSTALLED_APPS = ["doyen.integrations.django", "django_site"]
ROOT_URLCONF = "django_site.urls"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
LOGGING_CONFIG = None
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DATABASE", "db.sqlite3"),
    }
}
DOYEN = {"ttl_s": TTL_S}
