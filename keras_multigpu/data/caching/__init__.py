"""Decoded examples that are kept.

cached_source ───> memory_cache
              └──> folder_cache    across runs, for all processes of a machine
filling            how either is filled
"""
