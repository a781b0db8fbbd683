from .doctor import doctor as doctor
