"""x"""
def evaluate() -> None:
    """x"""
