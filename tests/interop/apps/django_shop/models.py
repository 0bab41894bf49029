"""What is in the database."""

from django.db import models


class Article(models.Model):
    name = models.CharField(max_length=40)
    color = models.CharField(max_length=10)
    price = models.DecimalField(max_digits=8, decimal_places=2)
