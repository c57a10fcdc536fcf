-- needs: session
-- ARGV: now, the deadline that counts ('expires' or 'ends'), then each mode and its idle deadline from
-- now on
local now = ARGV[1]
local counts, expires, ends, mode = unpack(
    redis.call('HMGET', base, ARGV[2], 'expires', 'ends', 'mode'))
if not counts then
    return { 'gone' }
end
if not has_come(counts, now) then
    local deadline = has_come(expires, now) and deadline_for(mode, 3)
    return { 'later', deadline and move_deadline(tonumber(now), deadline, ends) or expires }
end
local found = whole_record()
local tokens = redis.call('HGETALL', base .. ':u')
delete()
return { 'over', found, tokens }
