"""x"""
def serve() -> None:
    """x"""
