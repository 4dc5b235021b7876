"""The version of camshaft."""

__version__ = "0.1.0"
