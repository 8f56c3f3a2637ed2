"""x"""
def replay() -> None:
    """x"""
