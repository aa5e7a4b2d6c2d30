"""FastAPI dependencies: the objects shared by all requests to an application, and the caller of a request."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from service.api.messages.headers import ANONYMOUS
from service.serving.jobs.jobs import JobManager
from service.serving.learning.annotations import AnnotationStore
from service.serving.learning.trainings import TrainingManager
from service.serving.runtime import Runtime
from service.serving.storage.stack_store import StackStore


async def get_runtime(request: Request) -> Runtime:
    """Return the runtime of the application."""
    runtime: Runtime = request.app.state.runtime
    return runtime


async def get_async_jobs(request: Request) -> JobManager:
    """Return the manager of asynchronous jobs."""
    async_jobs: JobManager = request.app.state.async_jobs
    return async_jobs


def get_stacks(request: Request) -> StackStore:
    """Return the store of uploaded stacks."""
    async_jobs: JobManager = request.app.state.async_jobs
    return async_jobs.stacks


def get_annotations(request: Request) -> AnnotationStore:
    """Return the store of annotated stacks."""
    annotations: AnnotationStore = request.app.state.annotations
    return annotations


def get_trainings(request: Request) -> TrainingManager:
    """Return the manager of training runs."""
    trainings: TrainingManager = request.app.state.trainings
    return trainings


RuntimeDependency = Annotated[Runtime, Depends(get_runtime)]
AsyncJobsDependency = Annotated[JobManager, Depends(get_async_jobs)]


def get_quota_name(request: Request) -> str:
    """Return the name of the client whose quotas apply to a request.

    This is the name of the API key or, if the service has no keys, the client's address.
    """
    caller = get_caller(request)
    if caller not in {None, ANONYMOUS} or request.client is None:
        return caller or ANONYMOUS
    return request.client.host


def get_caller(request: Request) -> str | None:
    """Return the name of the caller, which identifies the owner of jobs and files; None if the caller is unknown."""
    caller: str | None = request.scope.get("state", {}).get("caller")
    return caller
