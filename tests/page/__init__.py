"""Tests of the web UI. They are a package, so that they can share browsers and services with its fixtures."""
