"""HTTP API. Only this package imports FastAPI, Starlette, uvicorn and python-multipart."""
