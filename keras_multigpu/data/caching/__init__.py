"""Caches of decoded examples.

cached_source  a source with a cache, and the cache in memory
folder_cache   a cache on a disk that all processes share
filling        reads missing examples
"""
