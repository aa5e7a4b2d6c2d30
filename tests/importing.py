"""Importing packages as `stackseg models import` does."""

from __future__ import annotations

from functools import partial

from service.models.importers import model_folder
from service.preprocess import prepare_tensor

import_model = partial(model_folder.import_model, prepare=prepare_tensor)
