"""Python client of StackSeg, a server that segments 3D microscopy stacks."""

from stackseg_client import errors
from stackseg_client.async_client import AsyncClient, AsyncJob
from stackseg_client.client import Client, Job
from stackseg_client.errors import ConnectionFailed, ProblemError, StackSegError
from stackseg_client.folders import FolderItem
from stackseg_client.parameters import Parameters
from stackseg_client.projects import AsyncProject, Project, ProjectMember, ProjectReport
from stackseg_client.reports import Inspection, JobReport, Model, Stack
from stackseg_client.results import LowConfidence, Result
from stackseg_client.retries import Retries
from stackseg_client.service import local

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncProject",
    "Client",
    "ConnectionFailed",
    "FolderItem",
    "Inspection",
    "Job",
    "JobReport",
    "LowConfidence",
    "Model",
    "Parameters",
    "ProblemError",
    "Project",
    "ProjectMember",
    "ProjectReport",
    "Result",
    "Retries",
    "Stack",
    "StackSegError",
    "errors",
    "local",
]
