"""Prediction beyond one image: requests and events, the worker of the studio and its twin inside one process."""
