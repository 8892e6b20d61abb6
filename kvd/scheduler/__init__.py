"""(written with the package)"""
