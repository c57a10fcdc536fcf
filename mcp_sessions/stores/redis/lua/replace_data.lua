-- needs: session
-- ARGV: the version it must have, the version it gets, the value
local version = redis.call('HGET', base, 'datav')
if redis.call('EXISTS', base) == 0 or (version or '0') ~= ARGV[1] then
    return 0
end
redis.call('SET', base .. ':d', ARGV[3])
redis.call('HSET', base, 'datav', ARGV[2])
share_lifetime(base .. ':d')
return 1
