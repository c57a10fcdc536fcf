-- needs: session
-- ARGV: uri. Whether the session is there, and the token of the subscription.
if redis.call('EXISTS', base) == 0 then
    return { 0 }
end
local token = redis.call('HGET', base .. ':u', ARGV[1])
redis.call('HDEL', base .. ':u', ARGV[1])
return { 1, token }
