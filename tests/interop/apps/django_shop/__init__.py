"""The shop as a Django project, with its items in a database and an API of django-ninja."""
