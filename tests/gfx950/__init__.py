"""A software model of AMD gfx950 (CDNA4); machine.py tells what it is and how it works."""
