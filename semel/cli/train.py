"""x"""
def train() -> None:
    """x"""
