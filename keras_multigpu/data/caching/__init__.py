"""Caches of decoded examples.

cached_source  a source with a cache
memory_cache   one cache in memory, `folder_cache` one on a disk that all processes share
filling        reads what is missing
"""
