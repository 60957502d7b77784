"""A project of Django for `test_django.py`. Its settings are in `django_site.settings`."""
