"""Failing file operations: a shim under a whole command, and every state of the disk that a power cut may leave."""
