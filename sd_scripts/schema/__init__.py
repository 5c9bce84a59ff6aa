"""The contract between page, command line and engine: every option of every run. Imports no torch."""
