"""Do two ways to train the same samples agree?"""
