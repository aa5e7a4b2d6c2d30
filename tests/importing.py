"""Importing packages as `stackseg models import` does."""

from __future__ import annotations

from functools import partial

from service.inference.resample import prepare_tensor
from service.models.importers import import_model as model_folder

import_model = partial(model_folder.import_model, prepare=prepare_tensor)
