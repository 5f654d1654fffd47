"""The error of a check of the release."""


class ReleaseError(Exception):
    """What is built is not fit to be published; the message says what to change."""
