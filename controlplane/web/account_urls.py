"""Signing in and out, the second factor, and proving again who one is. No sign-up and no mail: an operator is added by
another.
"""

from allauth.account import views
from allauth.mfa.base import views as factors
from allauth.mfa.recovery_codes import views as recovery
from allauth.mfa.totp import views as totp
from django.urls import path

from controlplane.web.views import single_sign_on

urlpatterns = [
    path("login/", views.login, name="account_login"),
    path("login/code/", factors.authenticate, name="mfa_authenticate"),
    path("logout/", views.logout, name="account_logout"),
    path("inactive/", views.account_inactive, name="account_inactive"),
    path("password/change/", views.password_change, name="account_change_password"),
    path("password/set/", single_sign_on.no_password, name="account_set_password"),
    path("confirm/", views.reauthenticate, name="account_reauthenticate"),
    path("confirm/code/", factors.reauthenticate, name="mfa_reauthenticate"),
    path("second-factor/", factors.index, name="mfa_index"),
    path("second-factor/set-up/", totp.activate_totp, name="mfa_activate_totp"),
    path("second-factor/remove/", totp.deactivate_totp, name="mfa_deactivate_totp"),
    path("second-factor/recovery-codes/", recovery.view_recovery_codes, name="mfa_view_recovery_codes"),
    path("second-factor/recovery-codes/new/", recovery.generate_recovery_codes, name="mfa_generate_recovery_codes"),
    path("oidc/<str:provider_id>/", single_sign_on.begin, name="openid_connect_login"),
    path("oidc/<str:provider_id>/callback/", single_sign_on.come_back, name="openid_connect_callback"),
    path("single-sign-on/cancelled/", single_sign_on.cancelled, name="socialaccount_login_cancelled"),
    path("single-sign-on/disconnect/", single_sign_on.disconnect, name="single_sign_on_disconnect"),
]
