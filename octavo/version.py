"""The version, below all that tells it."""

VERSION = "0.1.0"
