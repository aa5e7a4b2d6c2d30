"""HTTP: the only home of FastAPI, Starlette, uvicorn and python-multipart."""
