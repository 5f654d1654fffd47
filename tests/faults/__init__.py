"""File operations that fail: a shim under a whole command, and the disks that a power cut may leave."""
