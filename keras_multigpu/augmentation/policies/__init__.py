"""Operations by name and magnitude: RandAugment, TrivialAugment, AugMix.

draws ───> policy ───> operations
"""
