"""The one error of the model."""


class Gfx950Error(Exception):
    """The model refuses: an unknown instruction, an access out of bounds, a result that it cannot know."""
