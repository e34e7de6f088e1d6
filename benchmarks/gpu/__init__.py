"""make gpu: everything that needs a GPU, in one command"""
