"""Importing packages as `stackseg models import` does."""

from __future__ import annotations

from functools import partial

from service.inference.preprocessing.resample import prepare_tensor
from service.models.importers.import_model import import_model as import_with

import_model = partial(import_with, prepare=prepare_tensor)
